"""The only place that imports names which torch does not promise to keep."""
