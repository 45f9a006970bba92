"""Jobs of regrow inside another engine: in pods of a JobSet or a TrainJob (`pods`), in actors of Ray (`ray`)."""
