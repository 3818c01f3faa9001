from pytest_ep import EPSuite


class TestFlashinferTwoSided(EPSuite):
    backend = "flashinfer_two_sided"
