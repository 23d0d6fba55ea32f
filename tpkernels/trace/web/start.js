showHeader();
showRanks();
showLegend();
showTable();
showMeaning();
listen();
lookAtIntervals();
draw();
document.documentElement.dataset.ready = "yes";
