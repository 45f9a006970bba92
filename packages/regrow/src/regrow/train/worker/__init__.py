"""How a worker takes part in a job, or trains alone: control, recovery, the body of a step."""
