"""Jobs of regrow inside another engine: pods of a JobSet or a TrainJob (`pods`), actors of Ray (`ray`)."""
