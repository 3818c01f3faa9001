from pytest_ep import EPSuite


class TestFlashinferEp(EPSuite):
    backend = "flashinfer_ep"
