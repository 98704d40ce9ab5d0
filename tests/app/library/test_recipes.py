"""Recipes are run files that start, and say why each value is as it is."""

from dataclasses import replace

import pytest

from app.errors import UsageError, UserError
from app.library.recipes import delete_recipe, find_recipe, list_recipes, save_recipe
from app.runfile.advice import advise
from app.runfile.run_file import format_run, parse_run
from app.runs.preflight import require_supported

RECIPES = list_recipes()


def test_there_is_a_recipe_for_each_usual_wish():
    kinds = {(recipe.spec.objective, recipe.spec.adapter.kind) for recipe in RECIPES}
    assert kinds == {("sft", "qlora"), ("sft", "lora"), ("sft", "full"), ("dpo", "qlora")}
    assert any(recipe.spec.packing for recipe in RECIPES)
    assert len({recipe.title for recipe in RECIPES}) == len(RECIPES)


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda recipe: recipe.name)
def test_a_recipe_is_a_run_file_that_can_start(recipe):
    require_supported(recipe.spec)
    assert parse_run(format_run(recipe.spec)) == recipe.spec
    assert advise(recipe.spec, ("cuda:0", "cuda:0")) == ()
    assert recipe.spec.model.startswith("path/to/")


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda recipe: recipe.name)
def test_a_recipe_says_what_it_is_for(recipe):
    assert 5 < len(recipe.title) < 40
    assert len(recipe.purpose) > 80
    assert all(len(line) <= 100 for line in recipe.text.splitlines())


def test_one_s_own_are_run_files_without_what_belongs_to_one_run(tmp_path):
    own = tmp_path / "recipes"
    spec = replace(RECIPES[0].spec, name="poems-7", nodes=("alpha", "beta"), shares=(1.0, 2.0))
    kept = save_recipe(own, "  My usual\n settings ", spec)
    assert (kept.name, kept.title, kept.is_own) == ("my-usual-settings", "My usual settings", True)
    assert "poems-7" in kept.purpose
    assert kept.spec == replace(spec, name="my-usual-settings", nodes="all", shares=None)
    assert list_recipes(own) == (*RECIPES, kept)
    again = save_recipe(own, "My usual settings!", spec)
    assert again.name == "my-usual-settings-2", "another title, the same letters"
    for title in ("", "my USUAL settings", RECIPES[0].title):
        with pytest.raises(UsageError):
            save_recipe(own, title, spec)
    (own / "broken.yaml").write_text("# Broken\n\nmodel: [")
    (own / "empty.yaml").write_bytes(b"")
    assert list_recipes(own) == (*RECIPES, again, kept)
    assert delete_recipe(own, kept.name) == kept
    assert list_recipes(own) == (*RECIPES, again)
    with pytest.raises(UsageError, match="ships with Rackless"):
        delete_recipe(own, RECIPES[0].name)


def test_a_full_disk_leaves_no_half_recipe(tmp_path):
    own = tmp_path / "recipes"
    own.write_text("not a folder")
    with pytest.raises(UserError, match="cannot be written"):
        save_recipe(own, "Mine", RECIPES[0].spec)


def test_a_recipe_that_is_not_there_names_those_that_are():
    with pytest.raises(UsageError, match="'dpo'") as error:
        find_recipe("dpo")
    assert "dpo-after-sft" in error.value.hint
