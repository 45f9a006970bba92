"""Records of many file formats become rows, and results become tables.

`files` reads records, `making` makes a row from one (*pure*), `inputs` makes lines of OpenAI's batch format from them;
`columns` computes the output's columns from a result (*pure*), and `outputs` writes them.
"""
