"""Every call to the operating system fails once: what hsstore says, keeps and finishes then. See `__main__`."""
