// Before anything is drawn: the theme that was chosen last, or the system's.
"use strict";
{
  const chosen = localStorage.getItem("theme");
  if (chosen === "dark" || chosen === "light") document.documentElement.dataset.theme = chosen;
}
