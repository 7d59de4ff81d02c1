"""How the commands of the pages of repacking are made small."""

REPLACED = [
    (r"--size 1024", "--size 64", "scenes are smaller than 1024 px"),
]
