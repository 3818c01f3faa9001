"""Every transport of the table of faults as a suite of one test module."""

from __future__ import annotations

from pytest_ep import EPSuite
from tests.faults.diagnosed import transport
from tests.faults.wrong_combines import COMBINE_FAULTS
from tests.faults.wrong_dispatches import DISPATCH_FAULTS

for _fault in (*COMBINE_FAULTS, *DISPATCH_FAULTS):
    _name = f"Test_{_fault.name}"
    globals()[_name] = type(_name, (EPSuite,), {"backend": transport(_fault)})
