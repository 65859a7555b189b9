"""What several studies share: texts, rows of tables, models, and how studies are found and run."""
