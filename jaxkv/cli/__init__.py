"""The command line, a file a command."""

COMMANDS = ("demo", "replay", "bench", "doctor")
