"""What the command line can do: one verb a file, each a frozen dataclass `Verb` whose fields are its flags and whose `run` does and prints it."""
