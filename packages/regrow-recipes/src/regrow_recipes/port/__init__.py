"""Changes that a training script would need for regrow, by its text alone: nothing of it is run. Pure.

`reading` finds the training in it, `habits` the listed habits in it, `editing` makes the lines that would change,
`adapting` those of scripts that use a framework, `proposing` puts the report for people together.
"""
