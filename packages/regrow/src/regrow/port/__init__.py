"""What a training script would have to change for regrow, by its text alone: nothing of it is run. Pure.

`reading` finds the training in it, `habits` what in it is on the list of habits, `editing` makes the lines that would
change, `adapting` those of scripts that use a framework, `proposing` puts together what people are told.
"""
