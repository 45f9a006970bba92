"""Jobs of HyperPod's operator as TrainingJobs of ours: needs `regrow-clusters`, which has that resource."""
