"""Objects without a state of their own: all that they hold is remembered, sent without pickle, and put back."""
