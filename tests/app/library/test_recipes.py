"""Recipes are run files that start, and say why each value is as it is."""

import pytest

from app.errors import UsageError
from app.library.recipes import find_recipe, list_recipes
from app.runs.advice import advise
from app.runs.readiness import expect_supported
from app.runs.spec_file import format_run, parse_run

RECIPES = list_recipes()


def test_there_is_a_recipe_for_each_usual_wish():
    kinds = {(recipe.spec.objective, recipe.spec.adapter.kind) for recipe in RECIPES}
    assert kinds == {("sft", "qlora"), ("sft", "lora"), ("sft", "full"), ("dpo", "qlora")}
    assert any(recipe.spec.packing for recipe in RECIPES)
    assert len({recipe.title for recipe in RECIPES}) == len(RECIPES)


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda recipe: recipe.name)
def test_a_recipe_is_a_run_file_that_can_start(recipe):
    expect_supported(recipe.spec)
    assert parse_run(format_run(recipe.spec)) == recipe.spec
    assert advise(recipe.spec, ("cuda:0", "cuda:0")) == ()
    assert recipe.spec.model.startswith("path/to/")


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda recipe: recipe.name)
def test_a_recipe_says_what_it_is_for(recipe):
    assert 5 < len(recipe.title) < 40
    assert len(recipe.purpose) > 80
    assert all(len(line) <= 100 for line in recipe.text.splitlines())


def test_a_recipe_that_is_not_there_names_those_that_are():
    with pytest.raises(UsageError, match="'dpo'") as error:
        find_recipe("dpo")
    assert "dpo-after-sft" in error.value.hint
