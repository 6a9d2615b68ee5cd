"""What people read of runs: one HTML page without any outside host, Markdown, and tables."""
