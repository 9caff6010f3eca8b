"""What the services answer: replies to prompts, results of uploads and searches, lists, statistics."""
