"""A worker's part in shadow proofs."""
