from pytest_ep import EPSuite


class TestTorchA2a(EPSuite):
    backend = "torch_a2a"
