// The page that takes files and sends them to its server, which runs on this machine.

function setUpDropping() {
  const zone = byId("drop"), input = /** @type {HTMLInputElement} */ (byId("files")), state = byId("state");
  let isBusy = false;

  /** @param {File[]} files */
  const open = async (files) => {
    if (!files.length || isBusy) return;
    isBusy = true;
    state.textContent = `Reading ${files.map((file) => file.name).join(", ")}`;
    let answer;
    try {
      const named = encodeURIComponent(JSON.stringify(files.map((file) => [file.name, file.size])));
      const response = await fetch("open", { method: "POST", headers: { "Fragdoctor-Files": named }, body: new Blob(files) });
      answer = await response.json();
    } catch {
      answer = { error: "The files could not be read. Folders cannot be dropped; is fragdoctor view still running?", hint: "" };
    }
    isBusy = false;
    if (answer.page) location.assign(answer.page);
    else state.textContent = `${answer.error} ${answer.hint}`;
  };

  for (const kind of ["dragover", "dragleave", "drop"]) {
    addEventListener(kind, (event) => {
      event.preventDefault(); // otherwise the browser leaves the page to open the file
      zone.classList.toggle("over", kind === "dragover");
      if (kind === "drop") open([.../** @type {DragEvent} */ (event).dataTransfer.files]);
    });
  }
  addEventListener("paste", (event) => {
    const files = [...event.clipboardData.files], text = event.clipboardData.getData("text/plain");
    open(files.length || !text ? files : [new File([text], "pasted.txt")]);
  });
  addEventListener("pageshow", () => { state.textContent = ""; });
  byId("choose").addEventListener("click", () => input.click());
  input.addEventListener("change", () => { open([...input.files]); input.value = ""; });
}

setUpTheme(() => {});
setUpDropping();
/** @type {any} */ (window).fragdoctor = { ready: true };
