from pytest_ep import EPSuite


class TestDeepepV2(EPSuite):
    backend = "deepep_v2"
