"""A worker in the shadow of another: what a proof needs of it."""
