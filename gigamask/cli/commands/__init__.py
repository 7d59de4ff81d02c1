"""The commands of the command line, a module each; they parse flags and print results."""
