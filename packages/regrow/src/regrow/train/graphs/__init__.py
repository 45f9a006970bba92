"""Objects that say no state of their own: what they hold is remembered, carried without pickle, and put back."""
