"""One worker's part in a job, or its training alone: control, recovery, the body of a step."""
