"""What each program does with its words: one module a kind of risk, one function a program."""
