"""The rules that judge a program by its words: one module for each kind of risk, one function for each program."""
