"""One run: what it is told, keeps, prints and saves. Imports what stands below it, no verb."""
