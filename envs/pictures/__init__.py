"""Pictures of matches, and the page that plays one in a browser."""
