"""Converts jobs of HyperPod's operator to regrow's TrainingJobs; needs `regrow-clusters`, which defines them."""
