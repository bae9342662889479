"""Several hosts on one machine: namespaces joined by a link, ranks in all of them, and what they send."""
