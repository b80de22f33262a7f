"""What the user sees: tables on the terminal and pictures in files."""
