"""The command line, a file a command."""

COMMANDS = ("demo", "replay", "plan", "bench", "doctor")
