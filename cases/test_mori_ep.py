from pytest_ep import EPSuite


class TestMoriEp(EPSuite):
    backend = "mori_ep"
