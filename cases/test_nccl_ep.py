from pytest_ep import EPSuite


class TestNcclEp(EPSuite):
    backend = "nccl_ep"
