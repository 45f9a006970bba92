"""Proposes the changes that a training script needs for regrow, from its text alone; runs none of it. Pure.

`reading` finds the training loop, `habits` the listed habits, `editing` changes the lines of plain loops, `adapting`
those of scripts that use a framework, `proposing` makes the report.
"""
