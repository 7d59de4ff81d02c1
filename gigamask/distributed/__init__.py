"""How the work meets the hardware: processes, what each of them keeps, what is computed twice to keep less, and the precision."""
