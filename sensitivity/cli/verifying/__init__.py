"""What ``sensitivity verify`` compares, and how it says what it found."""
