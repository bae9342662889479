"""What the schedule planned beside what each rank measured: read, summed up, drawn, and written as a trace file."""
