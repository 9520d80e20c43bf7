"""From words to a recipe: schema, composition, mistakes, factories."""
