"""The commands of `gigamask`, one module each; they parse flags and print results."""
