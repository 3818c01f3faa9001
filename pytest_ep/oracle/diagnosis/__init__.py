"""What happened to which message: every explanation of a wrong result, computed in the run that failed."""
