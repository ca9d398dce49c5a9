// The interactive pages follow the site's light or dark.
const frames = document.querySelectorAll("iframe.sample");

function show() {
  const isDark = document.body.dataset.mdColorScheme === "slate";
  try {
    localStorage.setItem("fragdoctor-theme", isDark ? "dark" : "light");
  } catch {
    // Without storage they follow the system.
  }
  for (const frame of frames) frame.src = frame.dataset.src;
}

if (frames.length > 0) {
  show();
  new MutationObserver(show).observe(document.body, { attributeFilter: ["data-md-color-scheme"] });
}
