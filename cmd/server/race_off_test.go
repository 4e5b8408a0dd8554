//go:build !race

package main

// raceDetector tells that the race detector is on, which makes everything many times slower and larger.
const raceDetector = false
