"""Who hears how a long extraction goes: metrics, a log, the list of failures, the time that is left, the disk."""
