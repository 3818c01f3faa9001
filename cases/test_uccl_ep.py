from pytest_ep import EPSuite


class TestUcclEp(EPSuite):
    backend = "uccl_ep"
