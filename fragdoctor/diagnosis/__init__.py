"""From findings to a diagnosis: verdict, checklist, ranked recommendations."""
