"""Jobs of regrow on Kubernetes (`operator`) and on Slurm (`slurm`), with one planner for both (`cluster`)."""
