"""From text to an add-on: corpus, streamed sums, closed-form solutions, and their report."""
