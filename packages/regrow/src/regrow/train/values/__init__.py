"""Plain values and arrays that a script has around its steps, as they were at one moment."""
