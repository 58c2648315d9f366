"""What services do with wrong messages of each other: a proxy on a link, and a sweep of faults."""
